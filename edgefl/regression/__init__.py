"""Tests on emulated devices: does this function take too long, or too much, on that phone?

What a test sees is `edgefl.pytest_plugin`; this is what it is made of, from the outside in.

    marks       what the mark asks for
    session     what the tests of one pytest process share
    device      the fixture: run a function, hold it to budgets and baselines
    verdict     PASS, FAIL or INVALID
    inference   what repeated measurements allow one to say
    baseline    what was measured before, in git; saving writes it
    table       the table at the end, JUnit's properties
    measurement a function's figures on a device, repeated until they are known
    process     the measuring process, from the test's side
    worker      the same from its own side; apart: it forks a process for each repetition
    repetition  what such a process does
    phone       what the function sees of its device; device_clock: its time
    reference   what CPU time is measured against; peak: memory
    imports     how a function gets from one process to the other; orders: what they say
"""
