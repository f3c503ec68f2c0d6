"""Tagged tensors between ranks: the handler and its channels."""

from vpipe.communication.all_reduce import AllReduce
from vpipe.communication.channel import HOST, Channel, Key
from vpipe.communication.handler import BUFFERED_MESSAGES, CommunicationHandler
from vpipe.communication.in_process import InProcessHub, InProcessWorld
from vpipe.communication.world import ProcessWorld, World, agree, agree_on

__all__ = [
    "BUFFERED_MESSAGES",
    "HOST",
    "AllReduce",
    "Channel",
    "CommunicationHandler",
    "InProcessHub",
    "InProcessWorld",
    "Key",
    "ProcessWorld",
    "World",
    "agree",
    "agree_on",
]
