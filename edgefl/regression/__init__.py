"""Tests on emulated devices: does a function take too much time or memory on a device?

`edgefl.pytest_plugin` is the pytest plugin. The modules of this package, from the outside in:

    device      the mark and the fixture, which runs a function and judges it by budgets and baselines
    session     options and processes that the tests of one pytest process share
    progress    the progress line
    table       the table at the end of the session, JUnit properties, saved baselines
    measure     the measuring loops, which repeat a function until its time is known precisely
    verdict     pure functions that judge measurements by budgets and a baseline
    baseline    baselines: measurements of earlier code, saved in files and kept in git
    counts      counted work, and pure functions that compare it with a baseline
    counted     counts the work of a call; each counter runs in its own forked process
    bytecode    counts the bytecode instructions that each function executes
    callgrind   counts the native instructions that each function executes, under Valgrind
    valgrind    requests to Valgrind from a program that runs under Valgrind
    measurement the metrics of a function on a device
    process     the test's interface to the measuring process: function locations, requests and answers
    worker      the measuring process, which forks a process for each repetition
    memory      the peak memory of a repetition's process and of all processes that this process started
    repetition  one repetition: a call at the device's pace, then calls that alternate with a reference
    calls       binds a function to its arguments and its setup, and seeds random numbers
    usage       the wall time, CPU time and waiting time of a process

Comparison of the head (the working tree) with the base (an earlier commit), `pytest --edgefl-against`:

    against     compares a function of the head with the same function of the base, and judges the result
    paired      pure functions that judge pairs of processes, one of the base and one of the head
    checkout    the base's commit, checked out in a temporary git worktree
    sides       the test's interface to the processes of base and head: requests and answers
    stem        the processes that run the functions of base and head

Publishing of results:

    publish     writes the outputs below at the end of the session
    gate        the results of a session, and the file that holds them
    markdown    GitHub's annotations, and Markdown for summaries and comments
    badge       a badge for a README
    gate_page   the HTML page of the results
    history     the history of the metrics in the baselines, and the commits that changed their level
"""
