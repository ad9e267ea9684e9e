"""gRPC calls by names: what a server's methods take and give is asked of it by reflection. Needs grpcio-reflection."""
import grpc
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase


class Methods:
    """The methods of one running Hotcell, as it tells them over its own socket."""

    def __init__(self, cell):
        # By itself it would name the socket's path as the host, in a form that is none of a host's.
        self.channel = grpc.insecure_channel(f"unix:{cell.socket}", [("grpc.default_authority", "localhost")])
        self.told = ProtoReflectionDescriptorDatabase(self.channel)
        self.pool = descriptor_pool.DescriptorPool(self.told)

    def services(self):
        """The names of all services."""
        return list(self.told.get_services())

    def call(self, channel, method, body, **options):
        """`body` is a message or the JSON of one; an answer, or for a stream the call, which gives them one by one."""
        service, name = method.split("/")
        described = self.pool.FindServiceByName(service).FindMethodByName(name)
        taken = message_factory.GetMessageClass(described.input_type)
        given = message_factory.GetMessageClass(described.output_type)
        kind = channel.unary_stream if described.server_streaming else channel.unary_unary
        ask = kind(f"/{method}", request_serializer=taken.SerializeToString, response_deserializer=given.FromString)
        return ask(json_format.ParseDict(body, taken()) if isinstance(body, dict) else body, **options)

    def message(self, name):
        """The class of a message by its full name."""
        return message_factory.GetMessageClass(self.pool.FindMessageTypeByName(name))
