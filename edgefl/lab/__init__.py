"""Measurements, each beside its limit in the same run (``edgefl bench``), and papers (``edgefl reproduce``).

These are commands of the installed package. Measurements that need a source tree, or hours: benchmarks/.

aggregate    the weighted sum against its contenders
ingest       updates a second that the server takes in, beside what bare sockets and memory allow
spawn        how fast clients start, and what memory they take
fidelity     how well devices are emulated: runs, bars and verdicts
memory       predicted beside measured memory of training steps on this host
truth        what devices are predicted to take, beside every published measurement; bars has its limits,
             host_truth has this host
chaos        a run whose processes are killed and that is resumed until it is done; outcome judges what it
             left, chaos_findings tells of it
workloads    what the clients of a measurement do in place of training
study        a paper's settings, arms, runs and verdicts; its table, page and summary.json; tuning: its steps
studies      reads a paper's study from experiments/papers/studies; fedbuff, fedstaleweight,
             ablations_fedbuff and ablations_privacy have claims that are not races
claims       a race of two algorithms, judged by a paper's claim (the statistics are in results)
mutants      wrong implementations that a claim must fail with; verdicts: the power of a study's verdicts
theory       what the papers prove, measured: of the arrivals in influence, of the descents in convergence on
             the problem in quadratic; frontier: how fair weights can be under a bounded step; strategic: a
             fleet that throttles itself
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
