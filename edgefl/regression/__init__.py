"""Tests on emulated devices: does this function take too long, or too much, on that device?

A test sees `edgefl.pytest_plugin`; its parts, from the outside in:

    device      the fixture: runs a function, holds its result to budgets and baselines; the mark, the session
    table       the table at the end, JUnit's properties, saved baselines
    measure     the loops: repetitions until the time is known, measurements until they can be judged
    verdict     the judge, pure: measurements, budgets and a baseline give a Verdict, or NeedMore
    baseline    earlier measurements, in git
    measurement a function's figures on a device
    process     the measuring process from the test's side: where functions are, requests and answers
    worker      the same from its own side: it forks a process for each repetition
    memory      the peak memory of such a process and all that it has started
    repetition  the work of such a process: the device's clock, link and memory, and the reference
"""
