"""Tests on emulated devices: does a function take too much time or memory on a device?

`edgefl.pytest_plugin` is the pytest plugin. The modules of this package, from the outside in:

    device      the mark and the fixture, which runs a function and judges it by budgets and baselines
    session     options and processes that the tests of one pytest process share
    progress    the progress line
    table       the table at the end of the session, JUnit properties, saved baselines
    measure     measuring loops: repeat until the time is precise, measure again until it can be judged
    verdict     pure functions that judge measurements by budgets and a baseline
    baseline    saved figures of earlier code, kept in git
    counts      counted work, and pure functions that compare it with a baseline
    counted     counts the work of a call, with a fork for each counter
    bytecode    executed bytecode instructions by function
    callgrind   native instructions by function, counted in Valgrind
    valgrind    requests to Valgrind from a program that runs in it
    measurement a function's figures on a device
    process     the test's interface to the measuring process: function locations, requests and answers
    worker      the measuring process, which forks a process for each repetition
    memory      peak memory of a repetition's process and of all processes that it started
    repetition  one repetition in its process: the device's clock, link and memory, and the reference
    calls       binds a function to its arguments and its setup
    usage       wall time, CPU time and waiting time of a process

Base against head (`pytest --edgefl-against`):

    against     compares a function of the head with the base's, and judges the result
    paired      pure functions that judge pairs of processes, one of the base and one of the head
    checkout    the base's commit, checked out in a temporary git worktree
    sides       the test's interface to the processes of both sides: requests and answers
    stem        the processes of both sides

Publishing of results:

    publish     writes the outputs below at the end of the session
    gate        the results as a file
    markdown    GitHub's annotations, and Markdown for summaries and comments
    badge       a badge
    gate_page   the HTML page
    history     the figures of baselines over commits, and their changes of level
"""
