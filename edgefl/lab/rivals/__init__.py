"""Programs of ``edgefl bench peers``: one for each framework, all with the same local training.

The program of another framework runs in the interpreter of that framework's environment, where edgefl is not
installed. Therefore these modules import only the standard library, numpy and torch; they import the
framework inside functions.

task          the data, the network and the local training of a setting; how a program reports its speed
with_edgefl   edgefl under the virtual clock
with_pfl      Apple's pfl-research
with_flower   Flower's simulation on Ray
with_flsim    Meta's FLSim
with_torch    the limit: training alone, in one process per core
"""
