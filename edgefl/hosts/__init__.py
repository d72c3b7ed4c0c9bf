"""More than one machine: clients or workers of a run on nodes (`docs/hosts.md`).

nodes       the nodes of a run, as its `edgefl.run.hosting.Hosts`: who has joined, who hosts which peer
node        one node: a process that joins a run and hosts peers of it, as forks of its own zygote
messages    what nodes and supervisor send each other
ray         a Ray cluster's nodes as `nodes.Nodes`; runs in the supervisor
ray_driver  the Ray driver, a separate process: starts one actor on each node, which joins the run

Ray places, monitors and restarts the actors; no other package imports Ray. `edgefl.run` does not import this
package: the command passes a `nodes.Nodes` to it.
"""
