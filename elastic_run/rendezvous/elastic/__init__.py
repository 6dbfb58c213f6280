"""The rendezvous of a job on several nodes: one coordinator over a store, everybody else follows its decisions.

Every decision is made in `elastic_run.core`; here are the threads, the store and the clock that it needs. One file, one
noun: `session` is the interface to the agent, `handler` builds it, `follower`, `speaker` and `coordinator` are the
threads of one agent, `hosting` serves a c10d store on this node, `farewell` is what a guardian says of a dead agent,
and `deaths` what the next agent on its machine says.
"""
