"""The options beside a path: what fsspec gets, and that no secret is taken or shown."""

from __future__ import annotations

import pytest

from pipeline.errors import SpecError
from pipeline.spec.parse import parse_spec
from pipeline.spec.schema import JobSpec


def spec_with(options: str, path: str = "in.jsonl", output: str = "out") -> JobSpec:
    """The smallest job, with the same options beside each of its three paths."""
    return parse_spec(
        f"""
name: job
model: {{path: some/model, storage_options: {options}}}
input: {{path: '{path}', storage_options: {options}}}
output: '{output}'
storage_options: {options}
tasks: [{{name: a, question: Why, labels: [x, y]}}]
"""
    )


@pytest.mark.parametrize(
    ("written", "options"),
    [
        ("{}", {}),
        ("{anon: true, use_ssl: false}", {"anon": True, "use_ssl": False}),
        ("{anon: no, use_ssl: False, x: [ON]}", {"anon": False, "use_ssl": False, "x": [True]}),
        (
            "{endpoint_url: http://store:9000, profile: me}",
            {"endpoint_url": "http://store:9000", "profile": "me"},
        ),
        (
            "{config_kwargs: {retries: {max_attempts: 3}, s3: {addressing_style: path}}}",
            {"config_kwargs": {"retries": {"max_attempts": 3}, "s3": {"addressing_style": "path"}}},
        ),
        ("{token: anon}", {"token": "anon"}),
    ],
)
def test_options_are_what_fsspec_takes_at_each_path(
    written: str, options: dict[str, object]
) -> None:
    spec = spec_with(written)
    assert spec.input.storage_options == spec.model.storage_options == options
    assert spec.storage_options == options
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    "written",
    [
        "{secret: hunter2}",
        "{key: hunter2}",
        "{token: hunter2}",
        "{password: hunter2}",
        "{client_kwargs: {aws_secret_access_key: hunter2}}",
        "{connection_string: hunter2}",
        "{sas_token: hunter2}",
        "{headers: {Authorization: Bearer hunter2}}",
        "{client_kwargs: {headers: {X-Api-Key: hunter2}}}",
        "{client_kwargs: {headers: {Proxy-Authorization: Basic hunter2}}}",
        "{client_kwargs: {cookies: {session: hunter2}}}",
        "{api_key: hunter2}",
        "{auth: hunter2}",
        "{basic_auth: hunter2}",
        "{s3_additional_kwargs: {SSECustomerKey: hunter2}}",
        "{passphrase: hunter2}",
        "{pkey: hunter2}",
        "{private_key: hunter2}",
        "{bearer: hunter2}",
        "{passwd: hunter2}",
        "{access_key: hunter2}",
        "{token: {type: service_account, private: hunter2}}",
        "{client_kwargs: {trace_configs: [{name: a}, {password: hunter2}]}}",
        "{client_kwargs: {headers: [[Accept, a/b], [Authorization, Bearer hunter2]]}}",
    ],
)
def test_a_secret_is_refused_at_each_path_and_not_shown(written: str) -> None:
    with pytest.raises(SpecError) as raised:
        spec_with(written)
    lines = str(raised.value).splitlines()
    places = [line.partition(":")[0] for line in lines]
    assert sorted(places) == ["input.storage_options", "model.storage_options", "storage_options"]
    assert all("is a secret" in line and "hunter2" not in line for line in lines)


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:hunter2@bucket/labels",
        "https://me:hunter2@host/labels",
        "https://ghp_hunter2@host/labels",
        "https://host/labels?X-Amz-Credential=a&X-Amz-Signature=hunter2",
        "https://host/labels?a=b&x-amz-security-token=hunter2",
        "https://host/labels?X-Goog-Signature=hunter2",
        "https://account.blob/labels?sv=1&sig=hunter2",
        "https://host/labels?access_token=hunter2",
        "https://host/labels?v=1&accessToken=hunter2",
        "https://host/labels?api_key=hunter2",
        "https://host/labels?apikey=hunter2",
        "https://host/labels?auth=hunter2",
    ],
)
def test_a_secret_in_a_url_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(SpecError) as raised:
        spec_with("{}", url, url)
    lines = str(raised.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["input.path", "output"]
    assert all("holds a password or a signature" in line for line in lines)
    assert "hunter2" not in str(raised.value)


def test_a_password_of_a_proxy_is_refused_and_not_shown() -> None:
    with pytest.raises(SpecError) as raised:
        spec_with("{config_kwargs: {proxies: {https: http://me:hunter2@proxy:3128}}}")
    assert "holds a password" in str(raised.value) and "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    [
        "https://host/@me/a.jsonl?author=x&design=y",
        "https://host/data.jsonl?version=3&keyword=signature",
        "s3://bucket/some@place/*.parquet",
        "s3://b@c/a.jsonl",
        "abfs://container@account.dfs.core.windows.net/labels",
        "sftp://me@host/labels",
        "/data/a:b@c",
    ],
)
def test_other_parts_of_a_url_are_no_secrets(url: str) -> None:
    spec = spec_with("{}", url, url)
    assert spec.input.path == spec.output == url
