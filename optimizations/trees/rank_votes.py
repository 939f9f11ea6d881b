"""Let ranks vote on functions with collectives: if one rank cannot record one, all run it without a graph.

Note [Recorded alike]. NCCL wants a collective to be captured on all ranks or on none. Stock ends the program where a
recording fails; Encore runs the function without a graph, and then the other ranks have to, too. Each rank votes when
it has recorded the function, or could not; no rank waits (`ranks`). Until the others have heard of a NO, a few calls
are mixed: the same collectives in the same order, from a graph on some ranks. Whatever else would be decided by
measurements or by data is left as stock has it in such a function (`in_place.generated`: it is never captured again).
"""

from __future__ import annotations

import threading
import weakref

from optimizations.one_line import one_line
from optimizations.ranks import NO, YES, Decision, Topic, Vote, close_current, current_ballot, ranks_of
from optimizations.trees.function import RecordableFunction

_voted: weakref.WeakKeyDictionary[RecordableFunction, tuple[object, Topic, str]] = weakref.WeakKeyDictionary()
_lock = threading.RLock()
"""What a finalizer calls while this thread holds it must not wait for it."""


def tell_ranks(function: RecordableFunction) -> None:
    """Callback: a function was recorded, or could not be: then `without_graph` says why. Does not wait.

    Lets no exception of its own out: the call it happens in has been served.
    """
    try:
        _tell_ranks(function)
    except Exception as error:
        close_current(one_line(error))


def _tell_ranks(function: RecordableFunction) -> None:
    collectives = function.code().collectives
    ballot = current_ballot() if collectives else None
    if ballot is None or ballot.closed is not None:
        return
    choice = YES if function.without_graph is None else NO
    with _lock:
        before = _voted.get(function)
        if before is not None and before[0] is ballot:
            topic = before[1]
            if before[2] == choice:
                return
        else:
            ranks = ranks_of(collectives)
            if len(ranks) < 2:
                return
            topic = ballot.topic(collectives, ranks)
        _voted[function] = (ballot, topic, choice)
    reference = weakref.ref(function)

    def told(decision: Decision) -> None:
        heard = reference()
        if heard is not None and decision.choice == NO and heard.without_graph is None:
            heard.without_graph = f"rank {decision.by} runs it without a graph: {decision.reason}"

    ballot.vote(topic, Vote(choice, function.without_graph or ""), told)
