"""One run: the processes of ``edgefl run``, what they say to each other, and what each does.

supervisor      starts the others and watches them, and writes the results; view is what the user sees
zygote          loads torch, data and model once, then forks a process for each client; workload is what
                it loads; one more fork is the governor (limits.held)
server_process  takes over channel and buffer, and serves; server is its loop, virtual the same by an agenda
gate            what comes in: read, decoded, held against what was asked for
engine          the core's actions carried out: slots leased, updates summed, rows written
outbox, virtual_outbox    what goes out
peers, roster, attendance who is connected; who fails; who comes and goes
evaluation      versions on their way to the evaluator
resume          a checkpoint of the run's state, and the state from a checkpoint
description, progress     what is written at the start; the figures while it runs
clock           emulated time on the wall clock, and alarms
agenda, dispatch          what is to happen by emulated time; which worker computes what
client, worker, evaluator the far side of the sockets; line is their connection
connection      local_sockets and zeromq_sockets: how messages travel
transport       transport_shm and transport_wire: how numbers travel
messages        between server and peers; control between supervisor, zygote and server, over a channel
process         what every child process does first
verify          a finished run, made again from its journal
"""
