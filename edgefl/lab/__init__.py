"""Measurements of the installed package: ``edgefl bench``, ``edgefl reproduce`` and ``edgefl chaos``.

``edgefl/lab`` holds measurements that a user runs on any machine as commands; ``benchmarks/`` holds the
project's own long or source-tree measurements, such as soak runs, fuzzing and comparisons of two versions.

bench        common parts of all benches: runs for measurement, the host's facts, medians, judged figures
aggregate    the weighted sum compared with its alternatives and the limit of memory
ingest       updates per second that the server processes; bare: its limits in ZeroMQ and memory
spawn        start of clients, and their memory
peers        whole experiments of other frameworks compared with edgefl; rivals: the program of each framework
fidelity     the emulation's errors: runs, limits and verdicts
memory       predicted and measured memory of training steps on this host
truth        predicted and measured step times of all devices and this host, and their limits
board_truth  predicted and measured rates of boards, for code that is not torch
phone_truth  predicted and measured inference times on phones
workloads    what clients compute in a bench instead of training
chaos        kills processes of a run and resumes it until it is done; outcome judges and counts the results
verify       recomputes a finished run from its journal (``edgefl verify``)
study        a paper's settings, arms, runs and verdicts; its table, page and summary.json; tuning: its steps
studies      loads a study from experiments/papers/studies; fedbuff, fedstaleweight, ablations_fedbuff and
             ablations_privacy add claims that are not races
claims       comparisons of two algorithms, judged by a paper's claim, and limits on the errors of verdicts
mutants      wrong implementations that a claim must reject
theory       theorems of the papers, measured (influence: arrivals; incentive: the gain of throttling;
             stragglers: times of rounds; short_batches: steps on few examples; convergence: convergence
             theorems, on the problem in quadratic; unbounded, logistic: the theorem of Toghani and Uribe;
             delays: delays in DeFedAvg's emulated fleet)
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
"""Papers of ``edgefl reproduce``: studies of `edgefl.lab.studies`, and theory."""
