"""Models and updates as flat arrays, in shared memory and on disk.

buffer       shared memory with a ring of published models and slots for updates; the number formats of
             updates
checkpoint   files from which a run can be resumed
"""
