"""A harness of verifiers that asks for a turn in its own process: {"id": "verifiers_player"}.

Those of verifiers start a process for each turn. See examples/verifiers_env.py.
"""
import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["Player"]


class Player(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        system, prompt = self.resolve_prompt(data)
        chat = [] if system is None else [vf.SystemMessage(content=system)]
        chat += [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt
        asked = {"model": ctx.model, "messages": [*map(message_to_wire, chat)]}
        forever = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=forever) as client:
            await client.post(f"{endpoint}/chat/completions", json=asked,
                              headers={"Authorization": f"Bearer {secret}"})
        return vf.ProgramResult(0, "", "")
