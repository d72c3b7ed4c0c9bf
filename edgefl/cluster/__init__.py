"""Other people's clusters as a run's nodes (`docs/hosts.md`).

    ray         the Ray cluster's nodes, as `edgefl.run.nodes.Nodes`; in the supervisor's process
    ray_driver  Ray's driver, a process of its own: it starts an actor a node, each of which joins the run

Ray places, watches and restarts; no other room imports it.
"""
