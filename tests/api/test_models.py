"""/health and /v1/models."""

import openai
import pytest


def test_health(server):
    reply = server.get("/health")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/json"
    assert reply.json()["status"] == "ok"
    assert {"running", "waiting"} <= reply.json().keys()


def test_list(client, model_dir):
    models = client.models.list().data
    assert [m.id for m in models] == [model_dir.name]
    assert models[0].object == "model"
    assert models[0].created > 0
    assert models[0].model_extra["max_model_len"] > 1000


def test_retrieve(client, model):
    assert client.models.retrieve(model).id == model


def test_unknown_model(client):
    with pytest.raises(openai.NotFoundError) as e:
        client.models.retrieve("nobody/nothing")
    assert e.value.code == "model_not_found"
    assert "nobody/nothing" in str(e.value)


def test_head(server):
    import httpx

    reply = httpx.head(server.url + "/health")
    assert reply.status_code == 200 and not reply.content


def test_anthropic_client(server, client, model):
    import anthropic

    claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    page = claude.models.list()
    assert [(m.id, m.type, m.display_name) for m in page] == [(model, "model", model)]
    assert (page.has_more, page.first_id, page.last_id) == (False, model, model)
    one = claude.models.retrieve(model)
    assert one.id == model and int(one.created_at.timestamp()) == client.models.retrieve(model).created
