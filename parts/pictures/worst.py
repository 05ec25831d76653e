"""worst.py: the prompt of the largest micro-batch, of a model that sees."""
from dataclasses import replace

from data import Row
from parts.pictures.seeing import in_line


def row_of(rows: list[Row], text_row):
    """run.text_row → the same with the pictures of the row that has most for its tokens: the tower
    computes them as often as the micro-batch has room for that row."""
    seen = max((row for row in rows if row.pictures), default=None, key=lambda row: len(
        row.pictures.places) / len(row.prompt_ids))
    if not seen:
        return text_row

    def pictured(p: int, tokens: int) -> Row:
        times = max(1, tokens // len(seen.prompt_ids))
        places = [i % p for i in range(times * len(seen.pictures.places))]
        return replace(seen, prompt_ids=[0] * p, pictures=seen.pictures._replace(
            sources=seen.pictures.sources * times, places=places, positions=in_line(p).tolist()))

    return pictured
