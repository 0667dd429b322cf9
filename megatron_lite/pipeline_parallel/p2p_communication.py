"""Messages between pipeline stages: activations forward, gradients back.

    stage r-1  --- forward -->  stage r          four channels, each one direction of one kind, so that
    stage r-1  <-- backward --  stage r          messages on a channel come in the order of sending,
    last       --- forward, around -->  first    and with two stages (both neighbours the same rank)
    last       <-- backward, around --  first    nothing mixes

A receiver knows the whole schedule, so it knows in which order its senders send: it posts receives in that order, ahead
of their use where communication is to overlap, and picks messages by (pass, micro-batch, chunk). A send never waits for
its receiver here, so a schedule without circular waits (`schedule_check`) cannot deadlock. That a message was taken,
and its memory is free, follows from the schedule too: when a stage's result of some action arrives, that stage has
received all that its list needed before. (gloo cannot be asked: its sends never say that they are complete.)

On NCCL the first message of two ranks in a group sets up their connection, for which both wait. Within a schedule that
could be for ever (a stage that receives ahead waits for one that needs its result first), so channels are opened before
they are used, in the order in which messages would run through the stages.

A message is one tensor, or several (an encoder's output beside the decoder's stream), which follow each other on the
channel. Their shapes are known ahead, or (variable sequence lengths) come in a header before them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_lite import collectives
from megatron_lite.collectives import Handle, group_rank, group_size
from megatron_lite.errors import ConfigError, PeerLost
from megatron_lite.pipeline_parallel.actions import Action, Kind, Message, Schedule, receiver_of

Shape = tuple[int, ...]
Tensors = list[Tensor]
_FIRST_TAG = 1 << 20  # away from the tags of other calls on the same group
_OPEN: set[tuple[ProcessGroup, bool]] = set()  # groups of channels, and whether around, that connect their ranks
_HEADER = 32  # numbers in a header: how many tensors, then per tensor its dimensions and sizes


@dataclass(frozen=True)
class Channel:
    """One direction of one kind of message between two stages."""

    peer: int
    forward: bool
    around: bool

    @property
    def tag(self) -> int:
        """Tells this channel from the others between the same two ranks."""
        return _FIRST_TAG + 2 * self.forward + self.around

    @property
    def content(self) -> str:
        """What is sent, for errors and counters."""
        return "activations" if self.forward else "gradients of activations"


@dataclass
class _Incoming:
    """A receive that has been posted."""

    action: Action
    tensors: Tensors
    handles: list[Handle]
    header: Tensor | None = None


@dataclass
class StageLink:
    """This stage's end of all channels, for one run of a schedule.

    Args:
        group: the pipeline's ranks in order.
        shapes: of the tensors of a message, `[s, b, h]` as this rank holds them; None: every message brings a header.
        dtype: of activations; gradients have the same.
        ahead: receives posted per channel before they are asked for. 0: none, communication does not overlap.
        groups: per (forward, around) a group of the same ranks for backends that do not tell messages apart by tags.
    Raises: ConfigError on such a backend without them.
    """

    group: ProcessGroup
    schedule: Schedule
    chunks: int
    shapes: Sequence[Shape] | None
    dtype: torch.dtype
    device: torch.device
    ahead: int = 1
    groups: dict[tuple[bool, bool], ProcessGroup] | None = None
    _sends: dict[int, deque[tuple[int, Handle, str]]] = field(default_factory=dict)  # peer -> place in its list, ...
    _orders: dict[Channel, deque[Action]] = field(default_factory=dict)
    _posted: dict[Channel, deque[_Incoming]] = field(default_factory=dict)
    _arrived: dict[Action, Tensors] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rank, self.stages = group_rank(self.group), group_size(self.group)
        if self.groups is None and dist.get_backend(self.group) != "gloo":
            raise ConfigError(
                f"pipeline stages over {dist.get_backend(self.group)} in a single group",
                why="there a group's messages arrive in the order of sending: activations and gradients would hold up "
                "each other",
                fix="groups of initialize_model_parallel or make_process_groups, or the field pp_channels",
            )
        self._open()
        for peer in range(self.stages):
            for action in self.schedule[peer]:
                target = receiver_of(action, peer, self.stages, self.chunks)
                if target is not None and target.rank == self.rank:
                    channel = self._channel(peer, self.rank, target.forward, peer)
                    self._orders.setdefault(channel, deque()).append(action)
        for channel in self._orders:
            self._posted[channel] = deque()
        self._places = [{action: place for place, action in enumerate(actions)} for actions in self.schedule]
        # Without backward and without a way round nothing ever comes back from the next stage; nor can it wait for us.
        self._one_way = self.chunks == 1 and all(a.kind is Kind.FORWARD for a in self.schedule[self.rank])

    def _channel(self, sender: int, receiver: int, forward: bool, peer: int) -> Channel:
        return Channel(peer, forward, (sender > receiver) == forward)

    def _open(self) -> None:
        """Exchange one message over each new channel."""
        for (forward, around), group in (self.groups or {}).items():
            if (around and self.chunks == 1) or (group, around) in _OPEN:
                continue
            _OPEN.add((group, around))
            last = self.stages - 1
            pairs = [(last, 0)] if around else [(stage, stage + 1) for stage in range(last)]
            for sender, receiver in pairs if forward else [(b, a) for a, b in reversed(pairs)]:
                if self.rank not in (sender, receiver):
                    continue
                channel = Channel(receiver if self.rank == sender else sender, forward, around)
                with _named(self.rank, f"opening the channel for {channel.content} with stage {channel.peer}"):
                    x, tag, purpose = torch.zeros(1, device=self.device), channel.tag, "opening channels"
                    if self.rank == sender:
                        collectives.send(x, group, to=receiver, tag=tag, purpose=purpose).wait()
                    else:
                        collectives.receive(x, group, source=sender, tag=tag, purpose=purpose).wait()

    def _group(self, channel: Channel) -> ProcessGroup:
        return self.group if self.groups is None else self.groups[channel.forward, channel.around]

    # -- sending

    def send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Send the result of an action to the stage that needs it; nothing if none does."""
        target = receiver_of(action, self.rank, self.stages, self.chunks)
        if target is None:
            return
        channel = self._channel(self.rank, target.rank, target.forward, target.rank)
        if self.shapes is None:
            self._post_send(_header(tensors).to(self.device), channel, target.action, "shapes of activations")
        given = [tuple(tensor.shape) for tensor in tensors]
        if self.shapes is not None and given != list(self.shapes):
            raise ConfigError(
                f"{action} gave {_spell(given)}",
                why=f"the next stage expects {_spell(self.shapes)}: the sequence length changes from batch to batch",
                fix="--variable-seq-lengths",
            )
        for tensor in tensors:
            self._post_send(tensor.to(self.dtype), channel, target.action, channel.content)
        if self._one_way:
            self._settle(channel.peer, self._places[channel.peer][target.action] - 2)

    def _post_send(self, x: Tensor, channel: Channel, action: Action, purpose: str) -> None:
        where = f"sending {channel.content} for {action} to stage {channel.peer}"
        with _named(self.rank, where):
            handle = collectives.send(x, self._group(channel), to=channel.peer, tag=channel.tag, purpose=purpose)
        self._sends.setdefault(channel.peer, deque()).append((self._places[channel.peer][action], handle, where))

    def _settle(self, peer: int, place: int) -> None:
        """Let go of the messages that a stage needed up to a place of its list: it has taken them."""
        sends = self._sends.get(peer, deque())
        while sends and sends[0][0] <= place:
            _, handle, where = sends.popleft()
            with _named(self.rank, where):
                handle.wait()

    # -- receiving

    def post_ahead(self) -> None:
        """Post receives, so that messages travel while this rank computes."""
        if self.shapes is not None:
            for channel in self._orders:
                self._post(channel, self.ahead)

    def receive(self, message: Message) -> Tensors:
        """Wait for the result of another stage's action.

        Raises: PeerLost naming the stage, the action and what was awaited.
        """
        if message.action in self._arrived:
            return self._arrived.pop(message.action)
        channel = self._channel(message.rank, self.rank, message.forward, message.rank)
        while True:
            if not self._posted[channel]:
                self._post(channel, 1)
            incoming = self._posted[channel].popleft()
            self._wait(channel, incoming)
            self._settle(channel.peer, self._places[channel.peer][incoming.action])
            if incoming.action == message.action:
                return incoming.tensors
            self._arrived[incoming.action] = incoming.tensors

    def _post(self, channel: Channel, upto: int) -> None:
        while len(self._posted[channel]) < upto and self._orders[channel]:
            action = self._orders[channel].popleft()
            incoming = _Incoming(action, [], [])
            if self.shapes is None:
                incoming.header = torch.empty(_HEADER, dtype=torch.int64, device=self.device)
                self._post_receive(incoming.header, channel, incoming, "shapes of activations")
            else:
                self._post_tensors(self.shapes, channel, incoming)
            self._posted[channel].append(incoming)

    def _post_tensors(self, shapes: Sequence[Shape], channel: Channel, incoming: _Incoming) -> None:
        incoming.tensors = [torch.empty(shape, dtype=self.dtype, device=self.device) for shape in shapes]
        for tensor in incoming.tensors:
            self._post_receive(tensor, channel, incoming, channel.content)

    def _post_receive(self, x: Tensor, channel: Channel, incoming: _Incoming, purpose: str) -> None:
        with _named(self.rank, f"receiving {channel.content} of {incoming.action} from stage {channel.peer}"):
            incoming.handles.append(
                collectives.receive(x, self._group(channel), source=channel.peer, tag=channel.tag, purpose=purpose)
            )

    def _wait(self, channel: Channel, incoming: _Incoming) -> None:
        with _named(self.rank, f"receiving {channel.content} of {incoming.action} from stage {channel.peer}"):
            for handle in incoming.handles:
                handle.wait()
            if incoming.header is not None:
                incoming.handles = []
                self._post_tensors(_shapes(incoming.header), channel, incoming)
                for handle in incoming.handles:
                    handle.wait()

    def finish(self) -> None:
        """Wait until all that was sent has been taken. Raises PeerLost as `receive` does."""
        for peer in self._sends:
            self._settle(peer, len(self.schedule[peer]))


class _named:
    """Adds to an error of communication which stage waited for what."""

    def __init__(self, rank: int, what: str):
        self.rank, self.what = rank, what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, PeerLost):
            what = f"pipeline stage {self.rank}, {self.what}: {error.what}"
            raise PeerLost(what, why=error.why, fix=error.fix) from error


def _spell(shapes: Sequence[Shape]) -> str:
    return ("an activation of " if len(shapes) == 1 else "activations of ") + " and ".join(map(str, map(list, shapes)))


def _header(tensors: Sequence[Tensor]) -> Tensor:
    numbers = [len(tensors)]
    for tensor in tensors:
        numbers += [tensor.dim(), *tensor.shape]
    assert len(numbers) <= _HEADER, f"{len(tensors)} tensors between two stages do not fit a header of {_HEADER}"
    return torch.tensor(numbers + [0] * (_HEADER - len(numbers)), dtype=torch.int64)


def _shapes(header: Tensor) -> list[Shape]:
    numbers = header.tolist()
    shapes, place = [], 1
    for _ in range(numbers[0]):
        dims = numbers[place]
        shapes.append(tuple(numbers[place + 1 : place + 1 + dims]))
        place += 1 + dims
    return shapes


def free(tensor: Tensor) -> None:
    """Give back the memory of an activation that was sent, but keep its place in autograd's graph.

    Its backward needs the graph, not the values. A view shares its memory with others and is left alone.
    """
    if tensor._base is None and tensor.grad_fn is not None:
        tensor.data = torch.empty(1, dtype=tensor.dtype, device=tensor.device)


def backward_from(outputs: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """`torch.autograd.backward`, for outputs whose memory `free` took: torch's own compares shapes first."""
    torch.autograd.Variable._execution_engine.run_backward(
        tuple(outputs),
        tuple(torch.ones_like(o) if g is None else g for o, g in zip(outputs, grads)),
        False,
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )
