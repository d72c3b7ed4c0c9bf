"""Models and updates as flat arrays, in shared memory and on disk.

buffer       shared memory with a ring of published models and slots for updates, and their formats
checkpoint   files from which a run resumes
"""
