"""Environments of verifiers. They ask an endpoint for each turn of the model, and a Task is one.

    python examples/verifiers_env.py "$(cat env.json)" > rows.jsonl   # see parts/turns/README.md
    python grpo.py --data rows.jsonl --reply examples/verifiers_env.py:Task --reward environment"""
import argparse
import json
from asyncio import Queue, new_event_loop

try:
    import verifiers.v1 as vf
    from aiohttp import test_utils, web
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config
except ImportError:
    raise SystemExit("examples/verifiers_env.py needs it: pip install verifiers==0.4.0.") from None


class Task:
    def __init__(self, row, seed):
        self.loop, self.heard, self.said = new_event_loop(), Queue(), Queue()
        self.episode = self.loop.create_task(self.play(row["env"], row["task"]))
        self.episode.add_done_callback(lambda _: self.heard.put_nowait([]))
        self.chat = self.loop.run_until_complete(self.heard.get()) or self.reward()

    async def play(self, config, data):
        env = load_environment(resolve_env_config(config))
        task = (kind := env.taskset.task_type())(kind.data_type()(**data), env.config.taskset.task)
        async with test_utils.RawTestServer(self.complete) as server, env.serving():
            client = vf.EvalClientConfig(base_url=str(server.make_url("/v1")))
            return await env.run_episode(task, vf.ModelContext("policy", client))

    async def complete(self, request):
        self.heard.put_nowait((await request.json())["messages"])
        said = await self.said.get()  # None: there is no room for another turn
        choice = {"index": 0, "finish_reason": "stop", "message": said}
        return web.json_response({"id": "", "object": "chat.completion", "created": 0, "model": "",
                                  "choices": [choice]}, status=200 if said else 400)

    def reply(self, turns):
        known = [*self.chat, {"role": "assistant", "content": turns[-1]["content"]}]
        self.said.put_nowait(known[-1])
        self.chat = self.loop.run_until_complete(self.heard.get())
        if self.chat and self.chat[:len(known)] != known:
            raise ValueError("it rewrites the conversation, or has a second player")
        return self.chat[len(known):] or None

    def reward(self):
        self.said.put_nowait(None)
        episode = self.loop.run_until_complete(self.episode)
        if not episode.ok:
            raise RuntimeError([e.message for it in (episode, *episode.traces) for e in it.errors])
        return sum(trace.reward for trace in episode.traces)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("env", type=json.loads, help="the [env] of vf-eval, as JSON")
    env = parser.parse_args().env
    for task in load_environment(resolve_env_config(env)).taskset.take(200):
        row = {"env": env, "task": task.data.model_dump(mode="json")}
        print(json.dumps({"prompt": Task(row, 0).chat} | row))
