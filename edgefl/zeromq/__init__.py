"""ZeroMQ sockets between the processes of a run, and authentication of the processes that connect.

sockets    ROUTER and DEALER sockets that never block on a send, and authentication
door       the socket to which peers (processes of the run) on other machines connect over TCP
keys       key files of the machines that may connect
strangers  limits on unauthenticated connections
"""
