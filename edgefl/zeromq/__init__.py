"""ZeroMQ sockets between a run's processes, and who may connect to them.

sockets    a ROUTER and a DEALER whose sends do not wait, and that notice a peer that does not read
door       the socket that processes of other machines connect to
keys       CurveZMQ keys in files: who may connect
strangers  connections that have not said who they are, and how many of them there may be
"""
