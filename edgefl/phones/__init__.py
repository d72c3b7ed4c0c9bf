"""The phones of a run, as supervisor, server, clients and workers all work them out, each for itself.

devices    the device and link of each client, and when it is online
trips      the plan of a client's trip: what each phase takes
dynamics   the book of what changes by itself: heat, charge, coming and going; a function of the journal
air        the cells whose link phones share, under the virtual clock
"""
