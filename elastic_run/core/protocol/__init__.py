"""The words and records that nodes of a job send each other, and how they become JSON.

| module | what it holds |
|---|---|
| `codec` | records to JSON and back, with every value checked |
| `decisions` | what a coordinator decides of a whole round or job: its halt, its end |
| `facts` | what a node tells of itself and of the end of its workers |
| `node_status` | the document of a node's state, and whether a document of another node is one |
| `outcomes` | what became of a round on a node, and why a node leaves |
"""
