"""Measure the time that a device takes for each class of torch operation: on this machine, over ssh, or on
phones without Python.

kit      the measurement kit: one file that needs only Python and torch
remote   runs the kit in another process or on another host
"""
