"""Models and updates as flat arrays, in shared memory and on disk.

buffer          shared memory with a ring of published models and slots for updates
update_format   element types of updates: float32 or fewer bits
checkpoint      files from which a run resumes
"""
