"""Tests on emulated devices: does a function take too much time or memory on a device?

`edgefl.pytest_plugin` is the pytest plugin; the modules here, from the outside in:

    device      the fixture: runs a function, judges its result by budgets and baselines; the mark
    session     what the tests of one pytest process share
    progress    the progress line
    table       the table at the end of the session, JUnit properties, saved baselines
    measure     the loops: repetitions until the time is known, measurements until they can be judged
    verdict     the judge, pure: measurements, budgets and a baseline give a Verdict or NeedMore
    baseline    earlier measurements, kept in git
    counts      counted work and its comparison with a baseline, pure
    counted     counting a call: a fork for each counter
    bytecode    executed instructions by function
    callgrind   native instructions by function, counted in Valgrind
    valgrind    requests to Valgrind from a program that runs in it
    measurement a function's figures on a device
    process     the measuring process as the test sees it: functions by location, requests and answers
    worker      the measuring process itself: it forks a process for each repetition
    memory      peak memory of such a process and of all processes that it started
    repetition  the work of such a process: the device's clock, link and memory, and the reference
    calls       binds a function to its arguments and its setup
    usage       time that a process has used

Base against head (`pytest --edgefl-against`):

    against     compares a function of the head with the base's, and its verdict
    paired      the judge of pairs of processes, pure
    checkout    the base's commit, checked out in a temporary git worktree
    sides       the processes of both sides as the test sees them: requests and answers
    stem        these processes themselves

Publishing of results:

    publish     writes everything below at the end of the session
    gate        the results as a file
    markdown    GitHub's annotations, and Markdown for summaries and comments
    badge       a badge
    gate_page   the HTML page
    history     the figures of baselines over commits, and their changes of level
"""
