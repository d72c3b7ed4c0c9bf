"""Models and updates as flat numbers in memory and on disk.

buffer          the shared mapping: a ring of published models, slots for the updates on their way in
update_format   in which numbers an update travels and lies in its slot
checkpoint      the numbers that a run goes on from, as a file
"""
