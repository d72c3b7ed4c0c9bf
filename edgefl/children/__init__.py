"""The processes that the supervisor starts, and those that they fork: what each does with its life.

zygote           loads torch, data and model once, then forks a process for each phone
peer_process     what such a fork becomes: a client, a worker of the virtual clock, or the evaluator
governor         a fork that holds the computing phones to their share of the CPU
server_process   takes over channel and parameter buffer, and serves one run

`edgefl.processes` has what every one of them does first.
"""
