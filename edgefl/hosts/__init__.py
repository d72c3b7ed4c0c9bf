"""Runs on several machines: nodes, which are processes on these machines, host the clients or workers of a
run (`docs/hosts.md`). The clients or workers on a node are its peers.

nodes       the nodes of a run and their peers, as the supervisor sees them (`edgefl.run.hosting.Hosts`)
node        one node: it joins a run and starts peers as forks of its own zygote, a preloaded process
messages    messages between the nodes and the supervisor
ray         turns the nodes of a Ray cluster into `nodes.Nodes`; runs in the supervisor
ray_driver  the Ray driver, a separate process: it starts an actor on each Ray node, and the actor joins the
            run

Ray places, monitors and restarts the actors; no other package imports Ray. `edgefl.run` does not import this
package: the command passes a `nodes.Nodes` to it.
"""
