"""Where the parts of an endpoint leave their effects and events, until the driver drains them."""

from kvpush.core.effects import Effect, SendFrame
from kvpush.core.errors import Reason
from kvpush.core.events import Counted, Event
from kvpush.core.ids import Epoch, LinkId
from kvpush.core.messages import Message, encode_frame


class Outbox:
    """Effects and events in the order in which they came about. `epoch` is our own."""

    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch
        self._effects: list[Effect] = []
        self._events: list[Event] = []

    def send(self, link: LinkId, destination: Epoch, message: Message) -> None:
        """Send a control message to the process `destination` (0: whoever is there)."""
        self._effects.append(SendFrame(link, encode_frame(self.epoch, destination, message)))

    def effect(self, effect: Effect) -> None:
        """Leave an effect."""
        self._effects.append(effect)

    def event(self, event: Event) -> None:
        """Leave an event."""
        self._events.append(event)

    def count(self, name: str, reason: Reason, amount: int = 1) -> None:
        """Let a named counter go up."""
        self._events.append(Counted(name, reason, amount))

    def take_effects(self) -> list[Effect]:
        """Effects since the last call."""
        effects, self._effects = self._effects, []
        return effects

    def take_events(self) -> list[Event]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events
