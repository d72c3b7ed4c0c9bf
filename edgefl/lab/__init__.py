"""Measurements of the installed package: ``edgefl bench``, ``edgefl reproduce`` and ``edgefl chaos``.

``edgefl/lab`` holds measurements that a user runs on any machine as commands; ``benchmarks/`` holds the
project's own long or source-tree measurements, such as soak runs, fuzzing and comparisons of two versions.

bench        parts shared by all benches: measured runs, facts about the host, medians, verdicts
aggregate    speed of the weighted sum, compared with other implementations and with memory bandwidth
ingest       updates per second that the server processes; bare: upper limits set by ZeroMQ and memory
spawn        start of clients, and their memory
peers        whole experiments of other frameworks compared with edgefl; rivals: one program per framework
fidelity     the emulation's errors: runs, limits and verdicts
memory       predicted and measured memory of training steps on this host
truth        predicted and measured step times of all devices and this host, and their limits
board_truth  predicted and measured speeds of single-board computers, for code without torch
phone_truth  predicted and measured inference times on phones
workloads    computations that replace training in a bench
chaos        kills processes of a run and resumes it until it is done; outcome: judges the results
verify       recomputes a finished run from its journal (``edgefl verify``)
study        a paper's settings, arms, runs and verdicts; its table, page and summary.json; tuning: the search
             for step sizes
studies      loads a study from experiments/papers/studies; fedbuff, fedstaleweight, ablations_fedbuff and
             ablations_privacy add claims other than races
claims       races: which of two algorithms reaches a target accuracy at lower cost; checks of the verdicts
mutants      wrong implementations that a claim must reject
theory       theorems of the papers, compared with measurements (influence: staleness and weights; incentive:
             the gain of a client that slows itself down; stragglers: durations of rounds; short_batches:
             learning-rate normalisation; convergence: convergence theorems, on the problem in quadratic;
             unbounded, logistic: the theorem of Toghani and Uribe; delays: delays in DeFedAvg's emulated
             fleet)
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
"""Arguments of ``edgefl reproduce``: the studies of `edgefl.lab.studies`, and ``theory``."""
