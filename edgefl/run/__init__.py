"""The processes of one ``edgefl run``, and the messages between them.

A peer is a process that connects to the server: a client, a worker or the evaluator. The modules are:

supervisor      starts and watches the other processes, and writes the results (view shows the run live)
sweep           executes the runs of a grid of settings and seeds, one after another or in parallel (lanes)
zygote          loads torch, the data and the model (workload) once, then forks a process for each peer
server_process  builds the parts of the server, for a new run or from a checkpoint (resume)
server          runs the server's loop, which turns messages into events and events into actions; it uses
                gate, timeline and engine
gate            decodes, checks and sends messages (peers holds the table of peers, and decides what happens
                when a peer fails)
timeline        is the source of events: wall (throttled clients) or virtual (an agenda of events; dispatch
                assigns tasks to workers)
engine          carries out the core's actions: it leases slots, sums updates, writes rows of the record and
                requests evaluations (evaluation holds the queue of versions to evaluate)
slots           allocates slots for updates and ring entries for model versions
aggregator      sums the updates in the slots and writes the next version into a ring entry
hidden          implements secure aggregation: its rules, the phones' keys, and the sums of hidden (masked or
                encrypted) updates (hidden_masks, hidden_pairwise and hidden_trusted implement one kind each;
                secure_process is the process that unmasks or decrypts sums; secure_parties is the code that
                the parties in secure_process share)
clock           implements clocks, alarms and the agenda
progress        collects the metrics for the live view, and the time that the server spends in each stage
client, worker  are the processes that train: a client at the speed of its device, a worker at the speed of
                the host; worker also runs the evaluator (assessor evaluates a model)
update          makes an update in a client or worker: it trains the model, writes the update and computes its
                checksum
connection      connects the server and its peers through ZeroMQ (messages defines the format of the messages;
                transport carries models and updates)
hosting         provides the hosts of the peers: this machine, or nodes (`edgefl.hosts`)
demands         checks that an experiment can run, and computes the memory and time scale that the run needs
control         defines the messages between the supervisor and the processes that it starts
web             is the supervisor's part of the live page; web_process serves the page (web_page.html) through
                web_http
"""
