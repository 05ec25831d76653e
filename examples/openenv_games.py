"""Environments of OpenEnv: a server, whose client this is. `pip install openenv==0.10.0`.

    python examples/openenv_games.py http://localhost:8000 > rows.jsonl    # a row for each seed
    python grpo.py --data rows.jsonl --reply examples/openenv_games.py:Game --reward environment
"""
import argparse
import json
from urllib.request import urlopen

try:
    from openenv import GenericEnvClient
except ImportError:
    raise SystemExit(
        "examples/openenv_games.py needs OpenEnv: pip install openenv==0.10.0.") from None


class Game:
    def __init__(self, row, seed):
        self.field, self.gained = row["field"], 0.0
        self.client = GenericEnvClient(base_url=row["server"]).sync()
        self.shown = shown(self.client.reset(seed=row["seed"]))
        self.session = self.client.state().get("episode_id")

    def reply(self, turns):
        said = turns[-1]["content"].rpartition("</think>")[2].strip()
        try:
            found = self.client.step({self.field: said} if self.field else json.loads(said))
        except (ValueError, TypeError, RuntimeError) as error:  # TypeError: JSON, but no object
            if isinstance(error, RuntimeError) and "VALIDATION_ERROR" not in str(error):
                raise
            return "error: this is no action"
        if self.client.state().get("episode_id") != self.session:  # it was silently made anew
            raise ConnectionError("the session was lost, and with it the game")
        self.gained += float(found.reward or 0)
        return None if found.done else shown(found)

    def reward(self):
        return self.gained

    def close(self):
        self.client.close()


def shown(found):
    """An observation as JSON, or as text if it has nothing else."""
    fields = {name: it for name, it in found.observation.items() if name != "metadata"}
    texts = [it for it in fields.values() if isinstance(it, str)]
    return texts[0] if len(texts) == len(fields) == 1 else json.dumps(fields, ensure_ascii=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("server", help="such as http://localhost:8000")
    server = parser.parse_args().server
    schema = json.load(urlopen(f"{server}/schema", timeout=10))
    field, *more = schema["action"]["properties"].keys() - {"metadata"}
    for seed in range(200):
        row = {"server": server, "field": None if more else field, "seed": seed}
        game = Game(row, seed)
        print(json.dumps({"prompt": game.shown} | row))
        game.close()
