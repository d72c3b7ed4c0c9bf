"""Models and updates as flat numbers in memory and on disk.

buffer          the shared mapping: a ring of published models, slots for the updates on their way in
update_format   in which numbers an update travels and lies in its slot
update_writer   from a trained model to the update in its slot, in one pass
checkpoint      the numbers that a run goes on from, as a file
"""
