"""From easy to hard, by the rows' own column: an epoch begins with the easiest rows.

E2H Reasoner: https://arxiv.org/abs/2506.06632 (it also fades out the easy rows). Without the column
the pass rate so far tells what is easy, so the first epoch is in the order of the file.
"""
COLUMN = "difficulty"  # of the rows: a larger number is harder


def easy_first(rows, known, **others):
    """Returns the rows in order."""
    def hardness(i):
        """Returns the difficulty of row i."""
        return rows[i].columns.get(COLUMN, -(known[i].rate or 0))

    return [rows[i] for i in sorted(range(len(rows)), key=hardness)]
