{{/* What the binary reads: addresses, the registry, and one TOML file a component. */}}

{{/* Ports of the containers: http and grpc for clients, the others for processes of the cluster. Each pod has its own address, so they need
no choice. */}}
{{- define "baton.ports" -}}
{http: 8000, grpc: 8001, internal: 8002, transfer: 8003, admin: 9000, etcd: 2379}
{{- end -}}

{{- define "baton.modelCachePath" -}}/var/cache/baton/models{{- end -}}

{{/* Where workers of one node meet. */}}
{{- define "baton.socketsPath" -}}/run/baton-sockets{{- end -}}

{{/* Where pods find the hub's access token. */}}
{{- define "baton.hubTokenPath" -}}/etc/baton-hub/token{{- end -}}

{{/* Where routers find the keys file. */}}
{{- define "baton.keysPath" -}}/etc/baton-keys/keys.toml{{- end -}}

{{/* Where the processes find the secret of their KV's names, and the Secret that it is in; empty: there is none. */}}
{{- define "baton.kvSecretPath" -}}/etc/baton-kv/secret{{- end -}}
{{- define "baton.kvSecret" -}}
{{- if .Values.kvSecret.secretName -}}
{{- .Values.kvSecret.secretName -}}
{{- else if eq .Values.tls.mode "generated" -}}
{{- include "baton.tlsPrefix" . }}-kv
{{- end -}}
{{- end -}}

{{/* Roles of the pods between which KV travels, as a YAML list. */}}
{{- define "baton.workers" -}}
- prefill
- decode
{{- if .Values.kvStore.enabled }}
- kv-store
{{- end }}
{{- end -}}

{{/* Key of a role's values. Takes role. */}}
{{- define "baton.key" -}}{{ eq .role "kv-store" | ternary "kvStore" .role }}{{- end -}}

{{/* Name in the registry, 1 to 63 of a-z, 0-9 and -; a long one is told apart from others by a digest. */}}
{{- define "baton.cluster" -}}
{{- $name := .Values.registry.cluster | default (printf "%s-%s" .Release.Namespace (include "baton.fullname" .)) -}}
{{- if gt (len $name) 63 -}}
{{- $name = printf "%s-%s" ($name | trunc 54) ($name | sha256sum | trunc 8) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{/* Names by which the members of the bundled etcd are reached, as a YAML list. */}}
{{- define "baton.etcdHosts" -}}
{{- $service := printf "%s-etcd" (include "baton.fullname" .) -}}
{{- range $i := until (int .Values.etcd.replicas) }}
- {{ $service }}-{{ $i }}.{{ $service }}.{{ $.Release.Namespace }}.svc
{{- end -}}
{{- end -}}

{{/* The registry in the words of --registry. Takes root and role. */}}
{{- define "baton.registry" -}}
{{- $registry := .root.Values.registry -}}
{{- if eq $registry.type "embedded" -}}
  {{- if eq .role "router" -}}
  embedded
  {{- else -}}
  http://{{ include "baton.fullname" .root }}-registry.{{ .root.Release.Namespace }}.svc:{{ (include "baton.ports" .root | fromYaml).internal }}
  {{- end -}}
{{- else -}}
  {{- $ports := include "baton.ports" .root | fromYaml -}}
  {{- $secure := ternary $registry.tls (ne (include "baton.tls" .root) "none") (eq $registry.type "external") -}}
  {{- $endpoints := $registry.endpoints -}}
  {{- if eq $registry.type "etcd" -}}
    {{- $endpoints = list -}}
    {{- range include "baton.etcdHosts" .root | fromYamlArray -}}
      {{- $endpoints = append $endpoints (printf "%s:%v" . $ports.etcd) -}}
    {{- end -}}
  {{- end -}}
  etcd{{ if $secure }}s{{ end }}://{{ join "," $endpoints }}/{{ include "baton.cluster" .root }}
{{- end -}}
{{- end -}}

{{/* A component's settings as a YAML mapping of the binary's own keys. Takes root and role. */}}
{{- define "baton.settings" -}}
{{- $v := .root.Values -}}
{{- $c := get $v (include "baton.key" .) -}}
{{- $ports := include "baton.ports" .root | fromYaml -}}
{{- $any := ternary "[::]" "0.0.0.0" (eq $v.ipFamily "IPv6") -}}
{{- $settings := dict
  "log" $v.log.filter
  "log_format" $v.log.format
  "drain_timeout" (printf "%ds" (int $c.drainSeconds))
  "model" $v.model
  "model_cache" (include "baton.modelCachePath" .root)
  "registry" (include "baton.registry" .)
  "admin" (printf "%s:%v" $any $ports.admin)
  "grpc" (printf "%s:%v" $any (ternary $ports.grpc $ports.internal (eq .role "router")))
-}}
{{- with $v.hub.endpoint -}}
  {{- $_ := set $settings "hub_endpoint" . -}}
{{- end -}}
{{- if $v.hub.token.secretName -}}
  {{- $_ := set $settings "hub_token_file" (include "baton.hubTokenPath" .root) -}}
{{- end -}}
{{- if and (has .role (list "prefill" "decode")) (include "baton.sharesModels" .root) -}}
  {{- $_ := set $settings "share_models" true -}}
{{- end -}}
{{- if include "baton.kvSecret" .root -}}
  {{- $_ := set $settings "kv_secret_file" (include "baton.kvSecretPath" .root) -}}
{{- end -}}
{{- if eq .role "router" -}}
  {{- $_ := set $settings "http" (printf "%s:%v" $any $ports.http) -}}
  {{- /* On a volume that outlives the container, not the pod. */ -}}
  {{- $_ := set $settings "view_file" "/tmp/view.json" -}}
  {{- /* Kubernetes starts pods again. */ -}}
  {{- $_ := set $settings "worker_wait" "30s" -}}
  {{- if eq $v.registry.type "embedded" -}}
    {{- $_ := set $settings "internal" (printf "%s:%v" $any $ports.internal) -}}
  {{- end -}}
  {{- with $v.servedName -}}
    {{- $_ := set $settings "served_name" . -}}
  {{- end -}}
  {{- if $v.keys.secretName -}}
    {{- $_ := set $settings "keys_file" (include "baton.keysPath" .root) -}}
  {{- end -}}
{{- else -}}
  {{- $shared := $v.workers.config -}}
  {{- if eq .role "kv-store" -}}
    {{- $shared = include "baton.kvStoreShared" .root | fromYaml -}}
  {{- end -}}
  {{- $settings = merge $settings $shared -}}
  {{- if and (ne $v.registry.type "embedded") (not (hasKey $settings "registry_ttl")) -}}
    {{- /* Routers notice a worker that died by its connections, so etcd need not be told every second that it lives. */ -}}
    {{- $_ := set $settings "registry_ttl" "30s" -}}
  {{- end -}}
{{- end -}}
{{- if and (ne .role "router") $v.workers.sockets.hostPath -}}
  {{- $_ := set $settings "transfer_sockets" (include "baton.socketsPath" .root) -}}
{{- end -}}
{{- if ne .role "router" -}}
  {{- $_ := set $settings "transfer" (printf "%s:%v" $any $ports.transfer) -}}
{{- end -}}
{{- $tls := include "baton.tls" .root -}}
{{- if ne $tls "none" -}}
  {{- range $setting, $file := dict "tls_cert" "tls.crt" "tls_key" "tls.key" "tls_ca" "ca.crt" -}}
    {{- $_ := set $settings $setting (printf "%s/%s" (include "baton.tlsPath" $.root) $file) -}}
  {{- end -}}
  {{- if eq $tls "permissive" -}}
    {{- $_ := set $settings "tls" "permissive" -}}
  {{- end -}}
{{- end -}}
{{- $settings = mergeOverwrite $settings $c.config -}}
{{- /* Without certificates the pods' network has to keep others away. */ -}}
{{- if not (hasKey $settings "tls_cert") -}}
  {{- $_ := set $settings "insecure_internal" true -}}
{{- end -}}
{{- toYaml $settings -}}
{{- end -}}

{{/* Ports that UCX listens on in a worker's pod, {first, last}; nothing if the workers do not use it. It takes any free port, unless its
own setting TCP_PORT_RANGE says which. Takes root and role. */}}
{{- define "baton.ucxPorts" -}}
{{- $used := false -}}
{{- range $role := include "baton.workers" .root | fromYamlArray -}}
  {{- $settings := include "baton.settings" (dict "root" $.root "role" $role) | fromYaml -}}
  {{- $transport := $settings.transport | default "auto" -}}
  {{- $set := or $settings.ucx_library $settings.ucx_options -}}
  {{- /* With TLS, auto leaves UCX out. */ -}}
  {{- if or (eq $transport "ucx") (and (eq $transport "auto") $set (not $settings.tls_cert)) -}}
    {{- $used = true -}}
  {{- end -}}
{{- end -}}
{{- if $used -}}
  {{- $settings := include "baton.settings" . | fromYaml -}}
  {{- $range := regexFind "TCP_PORT_RANGE=[0-9]+-[0-9]+" ($settings.ucx_options | default "") | trimPrefix "TCP_PORT_RANGE=" -}}
  {{- if not $range -}}
    {{- /* All but the binary's own. */ -}}
    {{- $range = printf "%d-65535" (add 1 (include "baton.ports" .root | fromYaml).admin) -}}
  {{- end -}}
  {{- $ends := splitList "-" $range -}}
{first: {{ first $ends }}, last: {{ last $ends }}}
{{- end -}}
{{- end -}}

{{/* A mapping of plain values as TOML. JSON's texts, numbers and lists of texts are also TOML's; whole numbers arrive as floats, which JSON
may write with an exponent. */}}
{{- define "baton.toml" -}}
{{- range $key, $value := . }}
{{- if and (kindIs "float64" $value) (eq (floor $value) $value) }}
{{ $key }} = {{ int64 $value }}
{{- else if not (kindIs "invalid" $value) }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{- end }}
{{- end -}}
