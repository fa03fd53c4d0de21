"""Waiting for Ray actors: every wait has a deadline, and every failure says who failed at what."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError


class ActorSilent(RuntimeError):
    """An actor did not answer before its deadline."""


class ActorDied(RuntimeError):
    """An actor's process ended while an answer was awaited."""


async def answer(ref: ray.ObjectRef, who: str, what: str, deadline_s: float) -> Any:
    """The result of a remote call.

    Args:
        ref: the call.
        who: the actor, as people should read it ("training rank 1").
        what: what it was asked for ("update").
        deadline_s: longest wait.

    Raises:
        ActorSilent: no answer within `deadline_s`.
        ActorDied: the actor's process ended.
        Exception: what the call itself raised, with the remote traceback as its cause.
    """
    try:
        return await asyncio.wait_for(asyncio.wrap_future(ref.future()), deadline_s)
    except TimeoutError:
        raise ActorSilent(f"{who} did not answer within {deadline_s:g} s ({what})") from None
    except RayTaskError as error:
        raise error.cause from error
    except RayActorError as error:
        raise ActorDied(f"{who} died ({what}): {error}") from error


async def answers(refs: Mapping[str, ray.ObjectRef], what: str, deadline_s: float) -> list[Any]:
    """The results of calls to several actors (name -> call), in order; the first failure is raised at once."""
    return await asyncio.gather(*(answer(ref, who, what, deadline_s) for who, ref in refs.items()))
