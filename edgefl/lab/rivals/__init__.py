"""The programs that ``edgefl bench peers`` runs: one per framework, all with the same local training.

Each program for another framework runs in that framework's own Python environment, where edgefl is not
installed. Its module therefore imports only the standard library, numpy and torch at the top, and imports the
framework inside functions.

task          data, network and local training of a setting, and the report of a program's speed
with_edgefl   edgefl under the virtual clock
with_pfl      Apple's pfl-research
with_flower   Flower's simulation on Ray
with_flsim    Meta's FLSim
with_torch    the upper limit: only the training, in one process per core
"""
