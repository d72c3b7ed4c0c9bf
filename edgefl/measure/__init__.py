"""Measures what a device takes for each class of operation: here, over ssh, and on phones without Python.

kit      the measuring, one file that needs Python and torch alone
remote   the kit on another host, over ssh
"""
