"""`python -m rft.steps` prints the table of steps and the diagram that the README shows."""

from rft.steps import table

EDGES = table.rows_of_the_library()
print(f"{table.as_text(EDGES)}\n\n```mermaid\n{table.as_mermaid(EDGES)}\n```")
