"""One run: the processes of ``edgefl run``, what each does, and what they send each other.

supervisor      starts and watches the others, and writes the results; view shows them to the user
sweep           several runs of an experiment, started warm by a fork_server
zygote          loads torch, data and model (workload) once, then forks a process for each peer
server_process  builds the server's parts, or rebuilds them from a checkpoint (resume)
server          the loop: messages → events → actions, over the next three
gate            bytes in, checked messages out; messages in, bytes out (peers: who is there, who failed)
timeline        emulated time: wall (throttled clients) or virtual (an agenda, and dispatch to workers)
engine          the core's actions carried out: slots leased and summed, rows written, versions measured
                (evaluation)
clock           clocks, alarms and the agenda; progress: figures while it runs
client, worker  the processes that train, at the device's pace or the host's; worker has the evaluator too
                (assessor: its measurements)
update          train → amplify → write → checksum, for all of them
durability      what is done before a client is told that its update was taken in; witness: the clients' own
                account of that
connection      ZeroMQ between server and peers; messages is its language, transport carries the numbers
hosting         where the peers are: this host, or nodes (`edgefl.hosts`)
demands         whether an experiment can be run, the shape of its memory, the time scale hosts can carry
control         messages between the supervisor and the processes that it starts
web             the live page: what the supervisor tells web_process, which serves web_page by web_http
"""
