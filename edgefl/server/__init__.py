"""The server: turns messages into events, asks the core, and carries out what it answers.

server        the loop; ``virtual/server.py`` is the same under the virtual clock
reception     what comes in: read, decoded, held against what was asked for
outbox        what goes out: tasks, cancels, evaluations
executor      the core's actions carried out: slots leased, updates summed, rows written
aggregator    which slot belongs to which task, which ring entry may be overwritten, and the sum
peers         who is connected, who was last heard when
roster        what happens to peers that are silent, lie or die
attendance    phones that come and go by themselves, under the wall clock
assessments   versions on their way to the evaluator
checkpoints   when they are written
continuity    a checkpoint of the run's state, and the state from a checkpoint
description   what is written about a run before it begins
progress      the figures that the live view and the summary take from it
clock         emulated time on the wall clock, and alarms
stopwatch     where the server's own time goes
"""
