"""Nodes of a run on clusters managed by other software (`docs/hosts.md`).

ray         a Ray cluster's nodes as `edgefl.run.nodes.Nodes`; runs in the supervisor
ray_driver  the Ray driver, a separate process: starts one actor on each node, which joins the run

Ray places, monitors and restarts the actors; no other package imports it.
"""
