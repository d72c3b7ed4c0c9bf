"""Measure a device's time for each class of operation: here, over ssh, or on phones without Python.

kit      the measurement: one file that needs only Python and torch
remote   runs the kit in another process or on another host
"""
