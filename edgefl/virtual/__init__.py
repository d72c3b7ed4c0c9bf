"""The virtual clock: the same core and training, in the order of emulated time.

    agenda    what is to happen, by its time
    trip      a trip that is under way: what it takes is drawn the moment it starts
    dispatch  which tasks wait, which worker computes which, and what came back
    outbox    what the server says: to the agenda, or by its socket
    server    takes events from the agenda as soon as what they need has been computed
    worker    computes tasks of any client at full speed

Nothing waits for a phone. Training runs ahead in a few worker processes; an update is waited for only when
its arrival is due. So the run's bits depend on the seed alone: not on how many workers there are, how fast
they are, or which of them die.
"""
