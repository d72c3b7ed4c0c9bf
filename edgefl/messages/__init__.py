"""What the processes of a run say to each other: plain data, no behaviour.

wire      between server, clients, workers and evaluator, over sockets: the only place that parses their bytes
control   between supervisor, zygote and server, over channels (`edgefl.channel`)
"""
