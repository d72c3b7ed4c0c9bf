"""Programs of ``edgefl bench peers``: one for each framework, all with the same local training.

The program for another framework runs in the Python environment of this framework, in which edgefl is not
installed. Therefore these modules import only the standard library, numpy and torch at the top, and import
their framework inside functions.

task          the data, the network and the local training of a setting; how a program reports its speed
with_edgefl   edgefl under the virtual clock
with_pfl      Apple's pfl-research
with_flower   Flower's simulation on Ray
with_flsim    Meta's FLSim
with_torch    the upper limit: only the training, in one process per core
"""
