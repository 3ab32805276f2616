"""An object store that speaks S3: moto's, on loopback."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from moto.server import DomainDispatcherApplication, create_backend_app
from s3fs import S3FileSystem
from werkzeug.serving import make_server


@contextmanager
def s3_bucket() -> Iterator[str]:
    """``s3://…`` of an empty bucket, in moto's server in a thread; the environment says where that is.

    The server answers one request at a time: what it does on a condition nobody interrupts.
    """
    server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=False)
    thread = threading.Thread(target=server.serve_forever)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            patch.setenv(name, value)
        thread.start()
        try:
            S3FileSystem.clear_instance_cache()
            S3FileSystem().mkdir("bucket")
            yield "s3://bucket/catalogue"
        finally:
            S3FileSystem.clear_instance_cache()
            server.shutdown()
            thread.join()
            server.server_close()
