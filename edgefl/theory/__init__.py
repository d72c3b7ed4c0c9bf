"""What the papers prove or claim, as functions that can be measured; nothing is learned here.

bound.py     Toghani and Uribe's bound for FedBuff, on problems whose constants can be computed
weights.py   FedStaleWeight's equations 6 to 8 and the bounds of its theorem 1
fleet.py     arrivals of a fleet through the real core: applied weight and staleness of each client
"""
