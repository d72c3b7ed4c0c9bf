"""Measurements of the installed package: ``edgefl bench``, ``edgefl reproduce`` and ``edgefl chaos``.

``edgefl/lab`` contains the measurements that a user can run as commands on any machine. ``benchmarks/``
contains the project's own measurements, such as soak runs, fuzzing and comparisons of two versions, which
take a long time or need the source tree.

bench        code shared by all benchmarks: measured runs, description of the host, medians, verdicts
aggregate    speed of the weighted sum, compared with other implementations and with memory bandwidth
ingest       the number of updates per second that the server processes
bare         upper limits on the result of `ingest`, which ZeroMQ and the speed of memory set
spawn        how long clients take to start, and how much memory they use
peers        whole experiments of other frameworks compared with edgefl
rivals       the programs that `peers` runs, one per framework
fidelity     the errors of the emulation: the runs that measure them, their limits and the verdicts
memory       predicted and measured memory of training steps on this host
truth        predicted and measured step times of all devices and this host, and their limits
board_truth  predicted and measured speeds of single-board computers, for code without torch
phone_truth  predicted and measured inference times on phones
workloads    computations that replace training in a benchmark
chaos        kills processes of a run and resumes the run until it is done
outcome      compares the results of a run that `chaos` disturbed with those of an undisturbed run
verify       recomputes a finished run from its journal (``edgefl verify``)
study        the reproduction of a paper: settings, arms (algorithms to compare), runs and verdicts, and the
             report with its table, page and summary.json
tuning       the search for step sizes
studies      loads a study from its file in experiments/papers/studies (fedbuff, fedstaleweight: claims that
             are not in this file; ablations_fedbuff: the long-tailed data of FedBuff's ablations)
claims       a study's claims (races to a target accuracy, final accuracies, leads that are larger in one race
             than in another), and checks of the verdicts
mutants      wrong implementations that a claim must reject
theory       theorems of the papers, compared with measurements (influence: staleness and weights; incentive:
             the gain of a client that slows itself down; stragglers: durations of rounds; short_batches:
             learning-rate normalisation; convergence: convergence theorems, tested on the problem that
             quadratic defines; unbounded, logistic: the theorem of Toghani and Uribe; delays: delays in
             DeFedAvg's emulated fleet)
"""

PAPERS = (
    "fedbuff",
    "fedstaleweight",
    "defedavg",
    "theory",
    "ablations-fedbuff",
    "table2-fedbuff",
    "ablations-privacy",
    "ablations-defedavg",
    "deciding",
)
"""Names that ``edgefl reproduce`` accepts: the studies of `edgefl.lab.studies`, and ``theory``."""
