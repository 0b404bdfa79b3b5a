"""/v1/responses, as a translation onto chat: OpenAI's newer API, without anything kept between requests."""
