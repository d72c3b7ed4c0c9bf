"""The processes of one ``edgefl run``, and the messages between them. Modules:

supervisor      starts and watches the other processes, and writes the results (view: the live view)
sweep           makes the runs of a grid of settings and seeds, one after another or in parallel (lanes)
zygote          loads torch, data and model (workload) once, then forks a process for each peer
server_process  builds the server's parts, for a new run or from a checkpoint (resume)
server          the server's loop: messages → events → actions; uses gate, timeline and engine
gate            decodes, checks and sends messages (peers: table of peers, and what happens when one fails)
timeline        source of events: wall (throttled clients) or virtual (an agenda; dispatch assigns tasks to
                workers)
engine          carries out the core's actions: leases and sums slots, writes rows, requests evaluations
                (evaluation: their queue)
slots           allocation of update slots and ring entries, and the sum
hidden          secure aggregation: its rules, the phones' keys, sums of hidden updates (hidden_masks,
                hidden_pairwise, hidden_trusted: one for each kind; secure_process: the process that unmasks
                or opens sums, secure_parties: code that the parties in this process share)
clock           clocks, alarms and the agenda (progress: numbers for the live view, time per stage)
client, worker  processes that train, at the device's speed or the host's; worker also runs the evaluator
                (assessor: evaluation of a model)
update          trains, amplifies, writes and checksums an update, for clients and workers
connection      ZeroMQ between server and peers (messages: their format; transport: models and updates)
hosting         hosts of the peers: this machine, or nodes (`edgefl.hosts`)
demands         checks that an experiment can run; computes its memory and the time scale that the hosts need
control         messages between the supervisor and the processes that it starts
web             live page, supervisor side; web_process serves the page (web_page.html) through web_http
"""
