"""ZeroMQ sockets between a run's processes, and authentication of their peers.

sockets    ROUTER and DEALER sockets that never block on a send, and authentication
door       socket for peers on other machines, over TCP
keys       key files of the machines that may connect
strangers  limits on unauthenticated connections
"""
