"""Runs on several machines: clients or workers are hosted by nodes (`docs/hosts.md`).

nodes       the nodes of a run, which implement `edgefl.run.hosting.Hosts`, and the peers that each hosts
node        one node: a process that joins a run and hosts peers of it, as forks of its own zygote
messages    messages between nodes and supervisor
ray         turns the nodes of a Ray cluster into `nodes.Nodes`; runs in the supervisor
ray_driver  the Ray driver, a separate process: starts one actor on each node, which joins the run

Ray places, monitors and restarts the actors; no other package imports Ray. `edgefl.run` does not import this
package: the command passes a `nodes.Nodes` to it.
"""
